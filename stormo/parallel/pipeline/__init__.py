"""Pipeline parallelism: a model in stages (`split_points`, `partition`), their `schedules`, and the `engine`."""
