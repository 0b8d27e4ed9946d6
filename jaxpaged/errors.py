"""The errors a user can cause, each with the exit code the command line ends with.

    JaxPagedError                  1   anything of ours that has no narrower kind
    ├── ConfigError                2   job file, flag or engine setting is wrong
    │   └── CheckpointError        2   model files are missing, damaged or not a supported model
    ├── CapacityError              5   the model or the pool can never fit into memory
    ├── JobError                   1
    │   ├── StorageError           1   the output cannot be read or written: disk, network, rights
    │   ├── InputSchemaError       2   the input files or their columns are not what the job needs
    │   ├── IdentityError          3   the output folder belongs to a job that differs from this one
    │   ├── TooManyRowErrors       4   more rows failed than `max_errors` allows
    │   └── OutputConflictError    6   the output folder is in use or not ours
    └── OutOfBlocks                -   the scheduler's own signal; never leaves the engine

A bad *row* is not an exception: it becomes an output row whose `finish_reason` is "error".
"""

from typing import ClassVar


class JaxPagedError(Exception):
    """Any error of this package that a user can cause; `exit_code` is the process's exit status."""

    exit_code: ClassVar[int] = 1


class ConfigError(JaxPagedError):
    """A job file, flag or setting is wrong; the message names where and what to write instead."""

    exit_code = 2


class CheckpointError(ConfigError):
    """Model files are missing, damaged, or not of a supported architecture."""


class CapacityError(JaxPagedError):
    """The model or the pool can never fit; the message says what was needed and what there is."""

    exit_code = 5


class OutOfBlocks(JaxPagedError):
    """The pool has fewer free blocks than asked for; the scheduler preempts and tries again."""


class JobError(JaxPagedError):
    """A job could not be carried through; what was committed stays."""


class StorageError(JobError):
    """Stored bytes cannot be read or written; the message says where, why and what to do."""


class InputSchemaError(JobError):
    """The input files or their columns are not what the job file says."""

    exit_code = 2


class IdentityError(JobError):
    """The output folder holds a job whose result keys or input differ from this one's."""

    exit_code = 3


class TooManyRowErrors(JobError):
    """More rows ended in an error than `max_errors` allows."""

    exit_code = 4


class OutputConflictError(JobError):
    """The output folder is in use by another process, or not (any more) what this tool wrote."""

    exit_code = 6
