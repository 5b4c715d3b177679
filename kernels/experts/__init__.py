"""A mixture of experts (Shazeer et al., 2017): routing, sorting, products and sum of the chosen."""
