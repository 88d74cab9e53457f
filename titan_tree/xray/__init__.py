"""The X-ray of rollouts: where their tokens repeat, why they part, and which branches earn credit."""
