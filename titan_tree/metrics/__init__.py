"""Metrics compute the numbers of a step, and loggers record them.

titan_tree/registry.py lists both: METRICS and LOGGERS.
"""

from titan_tree.metrics.loggers import Logger, Loggers
from titan_tree.metrics.step_report import StepReport, step_values, validation_values

__all__ = ["Logger", "Loggers", "StepReport", "step_values", "validation_values"]
