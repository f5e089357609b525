"""Exported networks: parity with their models, and the accuracy of int8."""
