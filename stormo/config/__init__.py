"""What was asked, made into every effective value with its reason; no torch."""

from stormo.config.schema import option

__all__ = ["option"]
