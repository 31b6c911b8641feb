"""Command line: typed settings and recipes as commands."""
