"""Feature ``per-head-muon``: Muon that orthogonalises heads one by one and exchanges matrices peer to peer."""
