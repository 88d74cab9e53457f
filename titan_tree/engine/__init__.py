"""Everything that happens in one optimizer step, and scoring."""
