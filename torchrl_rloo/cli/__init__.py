"""The command line: typed settings, recipes as commands."""
