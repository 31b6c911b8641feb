"""Sandboxes for untrusted programs: everything that confines a program."""
