"""One module per table or figure of the paper: what it claims, how it is run again, what was found."""
