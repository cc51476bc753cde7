"""What every quantised checkpoint format has in common: it turns a module's stored tensors into one weight."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from .base import QuantizedWeight
from .module import Module
from .settings import Settings


class Format(ABC):
    """A `quantization_config` of one method. Raises `CheckpointError` or `UnsupportedModelError` for what it cannot read."""

    method: ClassVar[str]
    parts: ClassVar[frozenset[str]]
    """Last parts of tensor names that belong to a quantised weight, besides `weight` itself."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    @abstractmethod
    def weight(self, module: Module) -> QuantizedWeight | None:
        """The module's weight, None where it is stored plainly. Raises where its parts do not fit each other or the config."""

    @abstractmethod
    def quantizes(self, names: tuple[str, ...]) -> bool:
        """Whether the config says that the linear module of a decoder layer with these names is quantised."""

    def notes(self, weights: Mapping[str, QuantizedWeight]) -> list[str]:
        """What a user should know, beyond what each matrix says."""
        return []
