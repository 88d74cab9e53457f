"""One optimizer step, without optimizer, data or logging.

tree_step.py       TreeStep: the passes of one step: count, measure, score and train
step_io.py         the input and the result of a step; prepare_step makes inputs from trees on the host
losses.py          the loss of one micro-batch, and the sums of losses and router losses
partitions.py      the passes of a micro-batch, nested if it has partitions; the gateway cache
feature_cache.py   features of images in a frozen tower
forward.py         all forward passes without gradients
activations.py     where the activations of suspended partitions are stored
schedule.py        equal schedules for ranks that communicate within passes
bad_steps.py       the paths that caused a step without a finite loss or gradient
warm_up.py         inputs with which a compiled model compiles its graphs
device_clock.py    the seconds between two moments on a device, and of its waits for FSDP2
"""
