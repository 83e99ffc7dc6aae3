"""Who am I, whom do I talk to: process group, device, collectives."""
