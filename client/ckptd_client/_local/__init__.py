"""This process: its rank, the memory that it shares, copy engines, page guards."""
