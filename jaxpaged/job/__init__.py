"""The job layer: Parquet rows in, completions out.

A job file becomes a `JobSpec`; the spec and the input's footers become an input plan; rows stream
from the reader through the prompt builder into an engine, and back, in input order, into part
files. Only the runner knows an engine, and imports it when it needs one: reading a job file or
looking at its input loads no JAX.
"""
