"""What is trained: the Task contract and the built-in tasks."""
