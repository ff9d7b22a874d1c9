"""What `hpo doctor` looks at: machine, database, data, model, a few training steps, their time.

Its modules on machine and database run in the parent; the others load torch, in a worker.
"""
