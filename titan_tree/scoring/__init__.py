"""Scoring: log-probs of paths, without gradients.

score_trees.py      tree_logprobs, and scores of the paths of any trees
score_files.py      log-probs of data files, written as records that training reads
scored_records.py   a record and its scores -> the record with log-probs
resumable_file.py   a file that a killed run continues
"""
