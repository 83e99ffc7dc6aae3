"""Optimizers, parameter groups, learning-rate schedules."""
