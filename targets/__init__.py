"""What a device can do, as data, and how a target name resolves to it."""

from .target import Device, Target, list_targets, resolve_target

__all__ = ["Device", "Target", "list_targets", "resolve_target"]
