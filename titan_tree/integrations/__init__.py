"""Trainers of other frameworks on token trees: each file is for one framework, which it alone imports."""
