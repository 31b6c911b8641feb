"""Event loops, threads, child processes, files and HTTP: what every room needs and no user sees."""
