"""Where to run: context parallelism. The only folder that issues collectives."""
