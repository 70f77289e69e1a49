"""`co3 report`: what runs have left in their folders, as figures, tables and one page.

runs      folders in, one `Run` each out: settings, rounds, summary
saved     what was saved of gradients: laws, distances, sizes, moments, layer by layer
figures   one matplotlib figure for each question
page      the page that holds them all
"""
