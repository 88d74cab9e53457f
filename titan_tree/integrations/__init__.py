"""The same steps in Lightning, and other frameworks' trainers on trees."""
