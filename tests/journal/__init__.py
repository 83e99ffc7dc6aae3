"""Tests of the room `journal`."""
