"""Tests of the room `resuming`."""
