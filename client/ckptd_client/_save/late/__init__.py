"""Copies that run while training goes on, and their proofs."""
