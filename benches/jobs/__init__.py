"""What is measured: jobs as plain values, each with its rows and what is computed of them."""
