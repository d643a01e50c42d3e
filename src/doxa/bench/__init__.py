"""The tables people quote, one command each: `doxa bench uci`, `gap`, `ood`, `cifar`, `camvid`."""
