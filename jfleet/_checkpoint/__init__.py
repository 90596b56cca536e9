"""Checkpoints on disk: what a state's leaves are, how they are written and read.

``manifest`` says what a checkpoint holds, ``leaves`` takes a state apart for it,
``orbax_io`` moves arrays, ``commit`` makes a finished folder the current one,
``loading`` puts values where a target wants them. ``jfleet.save`` is the front door.
"""
