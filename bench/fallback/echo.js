// Messages to and fro in Node.js: `echo.js serve PORT`, `echo.js ask PORT CONNECTIONS BYTES SECONDS`. Prints round trips in a second.
const net = require('net');
const [, , role, port, connections, bytes, seconds] = process.argv;

if (role === 'serve') {
    net.createServer((socket) => {
        socket.setNoDelay();
        socket.on('error', () => {});
        socket.on('data', (data) => socket.write(data));
    }).listen(+port, '127.0.0.1');
} else {
    const message = Buffer.alloc(+bytes, 'x');
    let turns = 0, begin;
    const start = () => ((begin = process.hrtime.bigint()), (turns = 0));
    const end = () => {
        console.log(turns / (Number(process.hrtime.bigint() - begin) / 1e9));
        process.exit(0);
    };
    for (let i = 0; i < +connections; i++) {
        let got = 0;
        const socket = net.connect(+port, '127.0.0.1', () => {
            socket.setNoDelay();
            socket.write(message);
        });
        socket.on('data', (data) => {
            got += data.length;
            if (got < message.length) return;
            got = 0;
            turns++;
            socket.write(message);
        });
    }
    setTimeout(start, 300);
    setTimeout(end, 300 + 1000 * +seconds);
}
