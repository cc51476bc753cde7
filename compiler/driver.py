"""Compiles a model: checkpoint -> graph -> passes -> program -> bundle."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

import numpy as np
from torch import fx

from ..codegen.bundle_writer import BundleWriter, check_output, write_safetensors
from ..codegen.cpu.formats import MatrixFormat
from ..codegen.cpu.packing import Array, operand_row_bytes
from ..codegen.cpu.program import CpuProgram, lower
from ..codegen.cpu.toolchain import Compiler, compile_levels, find_compiler
from ..codegen.cpu.weight_layout import packed
from ..environment import CACHE, DUMP_DIR
from ..errors import ToolchainError, UsageError
from ..passes.graph import WeightTable
from ..passes.manager import Instrument, PassManager
from ..passes.pipelines import cpu_pipeline
from ..runtime.manifest import TargetEntry
from ..runtime.program import CPU_LEVELS, encode_program
from ..targets import Target
from .checkpoint import Checkpoint, open_checkpoint, open_config
from .dump_ir import DumpIr
from .model_files import model_facts, toolchain, truncate_layers, write_model_files
from .options import NATIVE, CompileOptions
from .progress import Progress, Silent
from .report import CompileReport
from .trace import trace
from .verify_passes import VerifyPasses
from .weights import WeightStore


def compile_model(
    model: str | Path, *, target: str | None = None, output: str | Path | None = None, **options: object
) -> CompileReport:
    """Compile `model` (HF folder, GGUF file or hub id) for `target` into the bundle `output`.

    Further keyword options are the fields of `CompileOptions`: `quantization`, `kv_dtype`, `num_layers`, `verify_each`, ...
    Raises subclasses of `LlmcError`; on any error no bundle is left behind.
    """
    unknown = sorted(set(options) - {f.name for f in fields(CompileOptions)})
    if unknown:
        valid = ", ".join(f.name for f in fields(CompileOptions))
        raise UsageError(f"compile: unknown option {unknown[0]!r}; the options are {valid}")
    given: dict[str, object] = {"target": target, "output": output, **options}
    for name in ("output", "config", "dump_ir"):
        if given.get(name) is not None:
            given[name] = Path(str(given[name]))
    return run(CompileOptions(model=str(model), **{k: v for k, v in given.items() if v is not None}))  # type: ignore[arg-type]


def run(options: CompileOptions, progress: Progress | None = None) -> CompileReport:
    """Do what `options` say, telling `progress` about each stage."""
    return _Compile(options, progress or Silent()).run()


class _Compile:
    """One compile; each stage reads what the stages before it left."""

    def __init__(self, options: CompileOptions, progress: Progress) -> None:
        self.options = options
        self.progress = progress
        self.target: Target = options.resolve_target()
        self.seconds: dict[str, float] = {}

    def run(self) -> CompileReport:
        with self._stage("open"):
            checkpoint = self._open()
            store = WeightStore(checkpoint)
            output = self.options.output or Path(f"{Path(checkpoint.name).name}.llmc")
            if self._writes:  # what would fail at the end fails now
                check_output(output)
                find_compiler()
        with self._stage("trace"):
            module = trace(checkpoint.config)
            store.check(WeightTable.of(module))
        report = CompileReport(
            model=checkpoint.name,
            target=self.target.name,
            architecture=str(checkpoint.config.model_type),
            num_parameters=sum(w.num_elements for w in WeightTable.of(module).values()),
            stage_seconds=self.seconds,
        )
        with self._stage("passes"):
            self._run_passes(module, store, report)
        if self.options.stop_after is not None:
            return report
        with self._stage("lower"):
            program = self._lower(module, checkpoint)
            source = program.source()
            report.describe_program(program, module)
        if self._writes:
            self._write(output, module, program, source, store, report)
        return report

    @property
    def _writes(self) -> bool:
        return not self.options.dry_run and self.options.stop_after is None

    def _open(self) -> Checkpoint:
        options = self.options
        model = Path(options.model)
        if model.is_file() and model.suffix == ".json" and not any(model.parent.glob("*.safetensors")):
            if options.config is not None:
                raise UsageError(f"--config {options.config}: {model} is a config itself; give one of the two")
            checkpoint = open_config(model)
        else:
            checkpoint = open_checkpoint(options.model, config_override=options.config)
        if options.num_layers is not None:
            truncate_layers(checkpoint, options.num_layers)
        return checkpoint

    def _run_passes(self, module: fx.GraphModule, store: WeightStore, report: CompileReport) -> None:
        options = self.options
        self.ir = DumpIr(options.dump_ir or DUMP_DIR.get())
        instruments: list[Instrument] = [self.ir]
        verify = None
        if options.verify_each is not None:
            verify = VerifyPasses(store, store.checkpoint.config.vocab_size, options.verify_each)
            instruments.append(verify)
        pipeline = cpu_pipeline(
            quantization=options.quantize_options(self.target),
            max_tokens=options.max_tokens,
            operand_row_bytes=_operand_row_bytes,
        )
        report.passes = PassManager(pipeline, instruments).run(module, options.stop_after)
        if verify is not None:
            report.verify_errors = verify.errors

    def _lower(self, module: fx.GraphModule, checkpoint: Checkpoint) -> CpuProgram:
        config = checkpoint.config
        return lower(
            module,
            model=checkpoint.name,
            target=self.target.name,
            scheme=self.options.scheme(self.target),
            vocab_size=config.vocab_size,
            context_length=config.max_position_embeddings,
            max_tokens=self.options.max_tokens,
        )

    def _write(
        self,
        output: Path,
        module: fx.GraphModule,
        program: CpuProgram,
        source: str,
        store: WeightStore,
        report: CompileReport,
    ) -> None:
        checkpoint, target = store.checkpoint, self.target.name
        compiler = find_compiler()
        with BundleWriter(output) as bundle:
            if not compiler.openmp:
                report.notes.append(f"{compiler.version} has no OpenMP: the libraries run on one thread; install g++ for more")
            with self._stage("kernels"):
                folder = bundle.folder(f"programs/{target}")
                (folder / "program.cpp").write_text(source)
                libraries = self._build(source, folder, compiler)
                report.libraries = {level: path.stat().st_size for level, path in libraries.items()}
                names = {level: path.name for level, path in libraries.items()}
                (folder / "program.json").write_bytes(encode_program(program.describe(names, compiler.platform)))
            with self._stage("weights"):
                weights = f"weights/{target}.safetensors"
                specs = [spec for weight in program.weights for spec in weight.specs()]
                tensors = self.progress.track(packed(program.weights, _reader(module, store)), len(specs))
                write_safetensors(bundle.root / weights, specs, tensors)
            with self._stage("tokenizer"):
                write_model_files(bundle.root, checkpoint)
            with self._stage("manifest"):
                bundle.write_json("report/compile.json", report.reproducible())
                for name, text in self.ir.texts.items():
                    (bundle.folder("report/ir") / f"{name}.txt").write_text(text)
                bundle.finish(
                    model=model_facts(checkpoint, report),
                    toolchain=toolchain(compiler.version),
                    targets=[TargetEntry(name=target, program=f"programs/{target}/program.json", weights=weights)],
                )
        report.output = output
        report.bundle_bytes = sum(path.stat().st_size for path in output.rglob("*") if path.is_file())

    def _build(self, source: str, folder: Path, compiler: Compiler) -> dict[str, Path]:
        """The shared libraries; the portable one, which finds out what a machine has, is always among them."""
        cache = CACHE.get()
        wanted = self.options.cpu_levels
        libraries = (
            {} if wanted is None else compile_levels(source, folder, levels=["portable"], compiler=compiler, cache=cache)
        )
        if wanted is None:
            wanted = compiler.levels
        elif NATIVE in wanted:
            wanted = (*wanted, CPU_LEVELS[ctypes.CDLL(str(libraries["portable"])).llmc_cpu_level()])
        missing = [level for level in wanted if level not in compiler.levels and level != NATIVE]
        if missing:
            raise ToolchainError(
                f"cpu level {missing[0]} cannot be built by {compiler.version} for {compiler.machine}; levels there: "
                f"{', '.join(compiler.levels)}"
            )
        rest = [level for level in compiler.levels if level in wanted and level not in libraries]
        return libraries | compile_levels(source, folder, levels=rest, compiler=compiler, cache=cache)

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        self.progress.stage(name)
        start = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - start


def _operand_row_bytes(text: str, width: int) -> int:
    format = MatrixFormat.parse(text)
    return operand_row_bytes(format.kind, width, format.group)


def _reader(module: fx.GraphModule, store: WeightStore) -> Callable[[str], Array]:
    """Reads a graph weight or constant in float32."""
    table = WeightTable.of(module)

    def read(name: str) -> Array:
        value = table.constants[name] if name in table.constants else store.read(table[name])
        return np.asarray(value.numpy(), dtype=np.float32)

    return read
