"""Speculative decoding on top of the commit schemes: drafts, acceptance, the loop over slots."""
