"""Rows of AReaL, prime-rl, SkyRL and slime -> TokenPaths, and values of paths back into their layouts.

Each framework is a file with a table of its fields, and a class with two functions, ``to_paths`` and
``to_rows``. docs/frameworks.md lists the fields. No framework is imported.

    areal.py      AReaL: a padded batch [B, T]; its trainer moves arrays one entry to the left
    prime_rl.py   PrimeRL: rows with one entry per token, perhaps several samples packed one after another
    skyrl.py      SkyRL: columns, with one entry per token of the response
    slime.py      Slime: samples or columns, with one entry per token of the response
    responses.py  what SkyRL and slime share: values of a response
"""

from titan_tree.integrations.frameworks.areal import AReaL
from titan_tree.integrations.frameworks.prime_rl import PrimeRL
from titan_tree.integrations.frameworks.skyrl import SkyRL
from titan_tree.integrations.frameworks.slime import Slime

__all__ = ["AReaL", "PrimeRL", "SkyRL", "Slime"]
