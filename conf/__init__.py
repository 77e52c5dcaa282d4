"""The Hydra configuration: one folder a group, named after the module that it builds."""
