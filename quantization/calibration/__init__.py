"""Calibration data: from a user's chats, texts or token ids to samples, with named warnings about what is doubtful."""

from .calibration import Calibration, CalibrationError, CalibrationWarning
from .load import load_calibration

__all__ = ["Calibration", "CalibrationError", "CalibrationWarning", "load_calibration"]
