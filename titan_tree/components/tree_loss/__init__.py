"""TreeLoss: any loss of single sequences, computed on a token tree.

settings.py         the table [loss], and LOSSES, the registry of loss functions
loss.py             TreeLoss, which reduces a loss over the paths of a global batch; register_loss
spec.py             LossSpec: a loss function and what it needs; call_loss checks what it returns
token_losses.py     sft; losses with one ratio per token: ppo and its relatives; distillation
sequence_ratios.py  losses with one ratio per path: gspo and its relatives
preferences.py      losses of preference pairs: dpo and its relatives; kto
corrections.py      what any of them can add: a KL penalty, a correction of rollout mismatch
ratios.py           ratios, KL estimates and sums over paths

A loss is a function of the log-probs of one sequence's tokens. A new loss takes one file and one line in
``LOSSES``, or the decorator ``register_loss`` in your own script.
"""
