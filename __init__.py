"""llmc compiles a causal language model into a bundle and runs the bundle without torch.

llmc.compile("path/to/model", target="cpu-int8", output="model.llmc")     # needs llmc[compile]
engine = llmc.load("model.llmc")                                          # needs neither torch nor transformers
print(engine.generate("The capital of France is").text)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.1.0"
__all__ = ["SamplingParams", "__version__", "compile", "load"]

if TYPE_CHECKING:
    from .compiler.driver import compile_model as compile
    from .runtime import SamplingParams, load

_LAZY = {
    "compile": (".compiler.driver", "compile_model"),
    "load": (".runtime", "load"),
    "SamplingParams": (".runtime", "SamplingParams"),
}


def __getattr__(name: str) -> object:
    """Import the two halves only when used: a service that loads bundles never imports the compiler."""
    if name not in _LAZY:
        raise AttributeError(f"module 'llmc' has no attribute {name!r}")
    from importlib import import_module

    module, attribute = _LAZY[name]
    try:
        return getattr(import_module(module, __name__), attribute)
    except ModuleNotFoundError as error:
        from .errors import MissingExtraError

        raise MissingExtraError(f"llmc.{name} needs the package {error.name!r}; run: pip install 'llmc[compile]'") from None
