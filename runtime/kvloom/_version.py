"""The version of kvloom, said here and nowhere else."""

__version__ = "0.1.0"
