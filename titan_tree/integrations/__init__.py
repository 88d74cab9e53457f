"""The same steps in Lightning, and other frameworks' trainers on trees.

hugging_face.py        treeify: trainers of TRL and transformers;  fused_head.py: TRL's fused head
verl.py                an engine of verl
rows.py                padded rows of a trainer as trees;  images.py: their images
tree_view.py           scores of rows by a model that stays in place;  step_forests.py: those of a step
lightning.py           a LightningModule, a data module, checkpoints;  lightning_callbacks.py: states in them
lightning_command.py   titan-tree train --trainer lightning;  lightning_settings.py: its table [lightning]
"""
