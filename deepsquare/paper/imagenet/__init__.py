"""Tables 4, 5 and 7 as proxies on small data sets."""
