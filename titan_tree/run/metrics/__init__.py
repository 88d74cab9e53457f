"""Metrics compute the numbers of a step, and loggers record them.

loggers.py          Logger, and the loggers of a run
builtin_loggers.py  log lines, metrics.csv and TensorBoard;  wandb.py: W&B;  mlflow.py: MLflow
step_metrics.py     StepReport, and what is computed from it
"""

from titan_tree.run.metrics.loggers import Logger, Loggers
from titan_tree.run.metrics.step_metrics import StepReport, logprob_gaps, step_values, validation_values

__all__ = ["Logger", "Loggers", "StepReport", "logprob_gaps", "step_values", "validation_values"]
