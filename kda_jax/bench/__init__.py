"""Timing of the recurrences, in one run, of implementations that have just passed parity."""
