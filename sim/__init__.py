"""The Flower app of co3_flower: real data, real training, counted bits.

Reading order: settings, data, models, task, outputs, client_app, server_app, engine, cli.
"""
