"""Global sample order, loaders, data sets."""
