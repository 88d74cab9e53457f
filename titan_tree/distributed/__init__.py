"""Parallelism over ranks, and optimizers. Only files of this folder import torchtitan and torchao.

settings.py           the tables [optimizer], [lr_scheduler] and [parallel]; the registry of optimizers
launch.py             torchrun's variables, and how ranks meet
mesh.py               the process group, and how ranks are divided
parallelize.py        turns a plain model into one that trains on any number of ranks
compiling.py          torch.compile for modules that run on trees
gradient_sync.py      when FSDP2 communicates within a step
sequence_parallel.py  ranks that share the tokens and heads of each tree
experts/              ranks that hold different experts and exchange tokens
collectives.py        sums and calls over all ranks
faults.py             timeouts, and failed collectives
agreement.py          checks that ranks are equal
optimizers.py  adamw.py         optimizers, clipping and learning rates
titan.py  ao.py       the parts of torchtitan and torchao that are used
"""
