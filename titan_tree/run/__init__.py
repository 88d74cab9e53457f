"""One training run: from a configuration to a finished folder.

config.py         Config, which composes the settings of all components; settings.py has those of a run
build.py          makes the components that the tables of the configuration describe
model_setup.py    makes the model on all ranks, with its weights, if it fits into memory
trainer.py        Trainer: the training loop
inputs.py         waits until all ranks are ready to run a step
optimizer_step.py one optimizer step, shared with Lightning
folder.py         the run's folder, its lock and its loggers, and what a run says about itself
rank_facts.py     what the ranks must agree on at the start
stopping.py       when a run ends early: signals, wrong data, other ranks
saved_model.py    the model in the folder of a run, a checkpoint or an export
balance/          which rank trains on which tree
checkpoint/       saves and resumes
metrics/          the numbers of a step, and loggers
"""
