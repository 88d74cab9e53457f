"""One optimizer step, without optimizer, data or logging.

tree_step.py       TreeStep: the forward and backward passes of one step
step_io.py         the input and the result of a step; StepPreparer makes inputs from trees on the host
step_run.py        the passes of a step: count, measure, score and train
partitions.py      the passes of a micro-batch, nested if it has partitions; the gateway cache
forward.py         all forward passes without gradients
activations.py     where the activations of suspended partitions are stored
router_loss.py     losses of routers over several forward passes
schedule.py        equal schedules for ranks that communicate within passes
bad_steps.py       the paths that caused a step without a finite loss or gradient
warm_up.py         inputs with which a compiled model compiles its graphs
exchange_timer.py  how long FSDP2 keeps kernels waiting
device_clock.py    the seconds between two moments on a device
"""
