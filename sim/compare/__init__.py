"""`co3 compare`: CO3 and its rivals in one app, in stages that build on what came before.

``plan`` reads the file and says which points a stage has; ``results`` keeps what they gave, a line
of JSON each, and ranks; ``table`` and ``figure`` show it.
"""
