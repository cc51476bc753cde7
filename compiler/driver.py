"""Compiles a model: checkpoint -> graph -> passes -> program -> bundle."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from torch import fx

from ..codegen import Backend, LoweredProgram, ModelShape, make_backend
from ..codegen.bundle_writer import BundleWriter, check_output
from ..environment import DUMP_DIR
from ..errors import UsageError
from ..passes.graph import WeightTable, copy_module
from ..passes.manager import Instrument, PassManager
from ..runtime.manifest import TargetEntry
from .checkpoint import Checkpoint, open_checkpoint, open_config
from .dump_ir import DumpIr
from .model_files import model_facts, toolchain, truncate_layers, write_model_files
from .options import CompileOptions, QuantizationOptions
from .progress import Progress, Silent
from .report import CompileReport, TargetReport
from .stored_formats import stored_formats
from .trace import trace
from .verify_passes import VerifyPasses
from .weights import WeightStore
from .write_weights import WeightPlan

if TYPE_CHECKING:
    from .calibrate import Calibrated, TargetQuantizer


def compile_model(
    model: str | Path, *, target: str | None = None, output: str | Path | None = None, **options: object
) -> CompileReport:
    """Compile `model` (HF folder, GGUF file or hub id) for `target` into the bundle `output`.

    `target` may name several, separated by commas: the bundle then holds a program for each, and the weights that they share once.
    Further keyword options are the fields of `CompileOptions` and `QuantizationOptions`: `quantization`, `kv_dtype`, `num_layers`,
    `method`, `calibration`, `max_kl`, ...
    Raises subclasses of `LlmcError`; on any error no bundle is left behind.
    """
    names = [f.name for part in (CompileOptions, QuantizationOptions) for f in fields(part) if f.name != "quantize"]
    unknown = sorted(set(options) - set(names))
    if unknown:
        valid = ", ".join(names)
        raise UsageError(f"compile: unknown option {unknown[0]!r}; the options are {valid}")
    nested = {name: options.pop(name) for name in list(options) if name in {f.name for f in fields(QuantizationOptions)}}
    if nested.get("calibration") is not None:
        nested["calibration"] = Path(str(nested["calibration"]))
    given: dict[str, object] = {"target": target, "output": output, **options}
    given["quantize"] = QuantizationOptions(**{k: v for k, v in nested.items() if v is not None})  # type: ignore[arg-type]
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
        self.backends = options.backends()
        self.seconds: dict[str, float] = {}
        self.dumps: dict[str, DumpIr] = {}
        self.quantizer: TargetQuantizer | None = None
        self.calibrated: dict[str, Calibrated] = {}

    def run(self) -> CompileReport:
        with self._stage("open"):
            checkpoint = self._open()
            output = self.options.output or Path(f"{Path(checkpoint.name).name}.llmc")
            tools: dict[str, str] = {}
            if self._writes:  # what would fail at the end fails now
                check_output(output)
                for backend in self.backends:
                    tools |= backend.check()
        with self._stage("trace"):
            module = trace(checkpoint.config)
            WeightStore(checkpoint).check(WeightTable.of(module))
        report = CompileReport(
            model=checkpoint.name,
            architecture=str(checkpoint.config.model_type),
            num_parameters=sum(w.num_elements for w in WeightTable.of(module).values()),
            stage_seconds=self.seconds,
        )
        stores = self._stores(checkpoint, module, output, report)
        programs = {
            backend.target.name: self._program(backend, module, stores[backend.target.name], report)
            for backend in self.backends
        }
        if self._writes:
            self._write(output, {name: program for name, program in programs.items() if program}, stores, tools, report)
            if self.quantizer is not None:
                self.quantizer.work.remove()
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

    def _stores(
        self, checkpoint: Checkpoint, traced: fx.GraphModule, output: Path, report: CompileReport
    ) -> dict[str, WeightStore]:
        """The weights of each target: quantised with calibration if that is asked for; the back ends then have the formats chosen."""
        if not self.options.calibrates or self.options.dry_run:
            store = WeightStore(checkpoint)
            for index, backend in enumerate(self.backends):
                if self.options.keeps_stored(checkpoint, backend):
                    self.backends[index] = self._keep_stored(backend, store, traced, report)
            return {backend.target.name: store for backend in self.backends}
        from .calibrate import TargetQuantizer

        with self._stage("calibrate"):
            folder = output.absolute().with_name(f".{output.name}.quantized")
            folder.parent.mkdir(parents=True, exist_ok=True)
            self.quantizer = TargetQuantizer(checkpoint, traced, self.options, folder, self.progress)
        stores = {}
        with self._stage("quantize"):
            for index, backend in enumerate(self.backends):
                done = self.quantizer.run(backend, self.options.program_options())
                self.backends[index] = done.backend
                stores[backend.target.name] = WeightStore(checkpoint, quantized=done.model)
                report.quantization[backend.target.name] = done.report
                self.calibrated[backend.target.name] = done
        return stores

    def _keep_stored(self, backend: Backend, store: WeightStore, traced: fx.GraphModule, report: CompileReport) -> Backend:
        """The back end with the formats in which the checkpoint is quantised already; notes tell what becomes of what."""
        formats = stored_formats(backend, traced, store)
        report.notes.append(f"{backend.target.name}: {len(formats)} matrices keep the codes they are stored in")
        if store.checkpoint.quantization is not None:
            report.notes += [line for line in store.checkpoint.quantization.lines() if line not in report.notes]
        return make_backend(backend.target, replace(self.options.program_options(), formats=formats))

    def _program(
        self, backend: Backend, traced: fx.GraphModule, store: WeightStore, report: CompileReport
    ) -> tuple[fx.GraphModule, LoweredProgram] | None:
        """The passes and the lowering for one target; None if the compile stops before the lowering."""
        name = backend.target.name
        part = report.targets[name] = TargetReport()
        module = copy_module(traced)
        with self._stage("passes"):
            self._run_passes(backend, module, store, part)
        if self.options.stop_after is not None:
            return None
        with self._stage("lower"):
            config = store.checkpoint.config
            shape = ModelShape(
                name=store.checkpoint.name, vocab_size=config.vocab_size, context_length=config.max_position_embeddings
            )
            program = backend.lower(module, shape)
            part.describe_program(program, module)
        return module, program

    def _run_passes(self, backend: Backend, module: fx.GraphModule, store: WeightStore, part: TargetReport) -> None:
        options, name = self.options, backend.target.name
        folder = options.dump_ir or DUMP_DIR.get()
        if folder is not None and len(self.backends) > 1:
            folder = folder / name
        self.dumps[name] = DumpIr(folder)
        instruments: list[Instrument] = [self.dumps[name]]
        verify = None
        if options.verify_each is not None:
            decoding = WeightStore(store.checkpoint, backend.decode_matrix, store.quantized)
            verify = VerifyPasses(decoding, store.checkpoint.config.vocab_size, options.verify_each)
            instruments.append(verify)
        part.passes = PassManager(backend.pipeline(), instruments).run(module, options.stop_after)
        if verify is not None:
            part.verify_errors = verify.errors

    def _write(
        self,
        output: Path,
        programs: dict[str, tuple[fx.GraphModule, LoweredProgram]],
        stores: dict[str, WeightStore],
        tools: dict[str, str],
        report: CompileReport,
    ) -> None:
        checkpoint = next(iter(stores.values())).checkpoint
        for backend in self.backends:
            report.notes += [note for note in backend.notes() if note not in report.notes]
        with BundleWriter(output) as bundle:
            with self._stage("kernels"):
                for name, (_, program) in programs.items():
                    report.targets[name].binaries = program.build(bundle.folder(f"programs/{name}"), self.progress.done)
            with self._stage("weights"):
                plan = WeightPlan.make(programs)
                for _ in self.progress.track(plan.write(bundle.root, stores), plan.num_tensors()):
                    pass
                report.weight_files = {name: (bundle.root / name).stat().st_size for name in plan.files}
            with self._stage("tokenizer"):
                write_model_files(bundle.root, checkpoint)
            with self._stage("manifest"):
                for target, dump in self.dumps.items():
                    for name, text in dump.texts.items():
                        (bundle.folder(f"report/ir/{target}") / f"{name}.txt").write_text(text)
                entries = [
                    TargetEntry(name=name, program=f"programs/{name}/program.json", weights=plan.by_target[name])
                    for name in programs
                ]

            def seal() -> None:
                with self._stage("manifest"):
                    bundle.write_json("report/compile.json", report.reproducible())
                    bundle.seal(model=model_facts(checkpoint, report), toolchain=toolchain() | tools, targets=entries)

            seal()
            if self.calibrated:
                with self._stage("gate"):
                    self._pass_gate(bundle.root)
                seal()  # over the report that now has the figures
            bundle.publish()
        report.output = output
        report.bundle_bytes = sum(path.stat().st_size for path in output.rglob("*") if path.is_file())

    def _pass_gate(self, root: Path) -> None:
        """Run the quantised programs that this machine can run, and hold them to the limit."""
        from .gate import check_limit, measure_bundle

        for name, done in self.calibrated.items():
            if done.backend.target.backend == "cpu":
                done.report.bundle_quality = measure_bundle(root, name, done.probe)
                check_limit(done.report.bundle_quality, name, self.options.quantize.max_kl)

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        self.progress.stage(name)
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
