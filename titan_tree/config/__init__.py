"""How a configuration is written, checked and read. run/config.py composes the settings of all components.

checks.py    the base class of tables, and the checks of their fields
registry.py  names that a key accepts, and their implementations
plugins.py   imports the user's code that a configuration names
files.py     opens regular files only; writes a file whole or not at all, and never over an input
toml.py      reads TOML files and key=value arguments, and writes TOML
"""
