// A Confluent-compatible schema registry for tests: it prints its address and serves until its input is closed.
package main

import (
	"fmt"
	"io"
	"os"

	"github.com/twmb/franz-go/pkg/sr/srfake"
)

func main() {
	registry := srfake.New()
	defer registry.Close()
	fmt.Println(registry.URL())
	io.Copy(io.Discard, os.Stdin)
}
